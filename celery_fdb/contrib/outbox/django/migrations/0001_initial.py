from django.db import migrations, models


class Migration(migrations.Migration):
    initial = True

    dependencies = []

    operations = [
        migrations.CreateModel(
            name="OutboxRow",
            fields=[
                ("id", models.CharField(max_length=32, primary_key=True, serialize=False, verbose_name="id")),
                ("signature", models.TextField(verbose_name="signature")),
                ("created_ms", models.BigIntegerField(verbose_name="created")),
                ("due_ms", models.BigIntegerField(null=True, verbose_name="due")),
                ("attempts", models.IntegerField(verbose_name="failed attempts")),
                ("error", models.TextField(null=True, verbose_name="error")),
            ],
            options={
                "verbose_name": "task in the outbox",
                "verbose_name_plural": "tasks in the outbox",
                "db_table": "celery_outbox",
                "default_permissions": ("view",),
                "indexes": [models.Index(fields=["due_ms"], name="celery_outbox_due")],
            },
        ),
    ]
